// A Go client: go run . 127.0.0.1:8001, with the generated code in ./shoalv1 (see docs/grpc.md).
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"shoal/shoalv1"
)

func ask(text string, temperature float32, maxTokens uint32) *shoalv1.ChatRequest {
	return &shoalv1.ChatRequest{
		Chat: &shoalv1.ChatPrompt{
			Messages: []*shoalv1.ChatMessage{{Role: "user", Content: &text}},
		},
		Options: &shoalv1.GenerationOptions{
			Sampling: &shoalv1.SamplingParams{Temperature: &temperature, MaxTokens: &maxTokens},
		},
	}
}

func chat(client shoalv1.InferenceClient) error {
	// A deadline of a minute for the whole answer.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stream, err := client.Chat(ctx, ask("Hello!", 0, 16))
	if err != nil {
		return err
	}
	fmt.Print("chat: ")
	for {
		answer, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		for _, piece := range answer.Pieces {
			fmt.Print(piece.Text)
			if piece.FinishReason != shoalv1.FinishReason_FINISH_REASON_UNSPECIFIED {
				fmt.Println("\nfinish:", piece.FinishReason)
			}
		}
		if answer.Usage != nil {
			fmt.Println("usage:", answer.Usage.PromptTokens, answer.Usage.CompletionTokens)
		}
	}
}

func cancelled(client shoalv1.InferenceClient) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := client.Chat(ctx, ask("Count for ever.", 1, 4000))
	if err != nil {
		return err
	}
	if _, err := stream.Recv(); err != nil {
		return err
	}
	cancel() // the work stops at the worker
	for err == nil {
		_, err = stream.Recv()
	}
	if status.Code(err) != codes.Canceled {
		return err
	}
	fmt.Println("cancelled: CANCELLED")
	return nil
}

func failed(client shoalv1.InferenceClient) error {
	stream, err := client.Chat(context.Background(), ask("Hello!", 9, 16))
	if err != nil {
		return err
	}
	_, err = stream.Recv()
	if status.Code(err) != codes.InvalidArgument {
		return err
	}
	fmt.Println("error: INVALID_ARGUMENT")
	for _, detail := range status.Convert(err).Details() {
		if request, ok := detail.(*errdetails.BadRequest); ok {
			fmt.Println("field:", request.FieldViolations[0].Field)
		}
	}
	return nil
}

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := shoalv1.NewInferenceClient(connection)
	models, err := client.ListModels(context.Background(), &shoalv1.ListModelsRequest{})
	if err != nil {
		log.Fatal(err)
	}
	for _, model := range models.Models {
		fmt.Println("model:", model.Id, model.MaxModelLen)
	}
	for _, step := range []func(shoalv1.InferenceClient) error{chat, cancelled, failed} {
		if err := step(client); err != nil {
			log.Fatal(err)
		}
	}
}
